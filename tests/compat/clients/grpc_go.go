// gRPC's client for Go, with stubs of Debian's generators; examples/chat_grpc.go is the short form.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	pb "tandem/v1"
)

var results = map[string]string{}

func check(name string, run func() error) {
	results[name] = ""
	if err := run(); err != nil {
		results[name] = fmt.Sprintf("%T: %.300v", err, err)
	}
}

func sampling(maxTokens uint32) *pb.SamplingParams { return &pb.SamplingParams{MaxTokens: &maxTokens} }

func main() {
	connection, err := grpc.Dial(os.Getenv("COMPAT_GRPC"), grpc.WithInsecure())
	if err != nil {
		panic(err)
	}
	client := pb.NewInferenceClient(connection)
	ctx := metadata.AppendToOutgoingContext(context.Background(), "authorization", "Bearer "+os.Getenv("COMPAT_KEY"))
	messages := []*pb.ChatMessage{{Role: "user", Content: "How is the weather?"}}

	check("models", func() error {
		answer, err := client.ListModels(ctx, &pb.ListModelsRequest{})
		if err != nil {
			return err
		}
		for _, model := range answer.Models {
			if model.Name == os.Getenv("COMPAT_MODEL") {
				return nil
			}
		}
		return fmt.Errorf("the model is not listed")
	})
	check("a text", func() error {
		prompt := &pb.GenerateRequest_Text{Text: "Once"}
		answer, err := client.GenerateUnary(ctx, &pb.GenerateRequest{Prompt: prompt, Sampling: sampling(8)})
		if err == nil && len(answer.TokenIds) == 0 {
			err = fmt.Errorf("no tokens")
		}
		return err
	})
	check("a conversation, streamed", func() error {
		stream, err := client.Chat(ctx, &pb.ChatRequest{Messages: messages, Sampling: sampling(8)})
		if err != nil {
			return err
		}
		var last *pb.ChatResponse
		for {
			part, err := stream.Recv()
			if err == io.EOF {
				break
			}
			if err != nil {
				return err
			}
			last = part
		}
		if last.FinishReason == pb.FinishReason_FINISH_REASON_UNSPECIFIED {
			return fmt.Errorf("the last message does not say why it is the last")
		}
		return nil
	})
	check("a function that must be called", func() error {
		parameters := `{"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"]}`
		answer, err := client.ChatUnary(ctx, &pb.ChatRequest{
			Messages:   messages,
			Sampling:   sampling(200),
			Tools:      []*pb.Tool{{Name: "weather", Parameters: parameters}},
			ToolChoice: &pb.ToolChoice{Mode: pb.ToolChoice_MODE_REQUIRED},
		})
		if err != nil {
			return err
		}
		var arguments struct{ City string }
		if err := json.Unmarshal([]byte(answer.Choices[0].Delta.ToolCalls[0].Arguments), &arguments); err != nil {
			return err
		}
		if arguments.City == "" {
			return fmt.Errorf("no city")
		}
		return nil
	})
	check("a regular expression", func() error {
		form := &pb.ResponseFormat{Format: &pb.ResponseFormat_Regex{Regex: "[0-9]{3}"}}
		request := &pb.ChatRequest{Messages: messages, Sampling: sampling(8), ResponseFormat: form}
		answer, err := client.ChatUnary(ctx, request)
		if err != nil {
			return err
		}
		if text := answer.Choices[0].Delta.Content; !regexp.MustCompile("^[0-9]{3}$").MatchString(text) {
			return fmt.Errorf("%q", text)
		}
		return nil
	})
	check("mistakes are INVALID_ARGUMENT", func() error {
		_, err := client.ChatUnary(ctx, &pb.ChatRequest{})
		if status.Code(err) != codes.InvalidArgument {
			return fmt.Errorf("not refused so: %v", err)
		}
		return nil
	})
	check("a deadline ends the call", func() error {
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		_, err := client.ChatUnary(short, &pb.ChatRequest{Messages: messages, Sampling: sampling(500)})
		if status.Code(err) != codes.DeadlineExceeded {
			return fmt.Errorf("not ended so: %v", err)
		}
		return nil
	})
	check("a cancelled stream ends", func() error {
		cancelled, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := client.Chat(cancelled, &pb.ChatRequest{Messages: messages, Sampling: sampling(500)})
		if err != nil {
			return err
		}
		if _, err := stream.Recv(); err != nil {
			return err
		}
		cancel()
		for {
			if _, err := stream.Recv(); err != nil {
				if status.Code(err) != codes.Canceled {
					return err
				}
				return nil
			}
		}
	})
	json.NewEncoder(os.Stdout).Encode(map[string]interface{}{"version": grpc.Version, "checks": results})
}
